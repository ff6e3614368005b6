"""Describes and checks the machines of a job: the table of machines, tiers, the schema of specs,
project and region."""
