"""Describes a job, what it may cost, what was sent; creates it exactly once and follows it to its
end."""
