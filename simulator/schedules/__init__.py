"""Pipeline schedules as plain data."""
