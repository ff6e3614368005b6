"""Describes and checks a job before it is submitted: machine table, tiers, schema, packages."""
