"""Pipeline parallelism: schedules as integer tables, their checker, their drawing; numpy only so far."""
