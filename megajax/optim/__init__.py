"""Update rules and the schedules that drive them."""
