"""Leads to trainer.invariance: files of users written for version 0.1 import its modules under this name."""
