"""Pipeline parallelism: schedules as integer tables, their checks and drawings, and the executor that runs them."""
