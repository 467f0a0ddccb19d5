"""Where arrays live: the mesh and its axes, the tables from logical to mesh axes, and moving between layouts."""
