"""What a config will do on devices that are not there: compile its train step for them and read the program."""
