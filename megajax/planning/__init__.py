"""Plans for virtual GPU devices: compile a train step or estimate it by formulas, search layouts, show the results."""
