"""Describes and checks the machines of a job: machine table, tiers, schema, project and region."""
