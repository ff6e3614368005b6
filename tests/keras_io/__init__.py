"""Networks, losses and steps as published on keras.io/examples, written again, each with the
glue that we need.

A file has the part that stands there, and below the line `# Glue` what a user adds: `data` and
`build`. The data are generated, in the shapes of the published ones.
"""
