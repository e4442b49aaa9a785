"""The command line: one thin file per command. A command is read without JAX; it imports what it needs when it runs."""
