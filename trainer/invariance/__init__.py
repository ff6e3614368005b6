"""Keeps the promise that the number of replicas changes no result: random numbers, losses,
gradients, batch norm."""
