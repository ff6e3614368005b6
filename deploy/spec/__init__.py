"""What a job is before it is sent: the machine table, tiers, schema, packages, and all checks of them."""
