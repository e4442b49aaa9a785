"""The command line: thin commands, a file for each subject. They are read without JAX and import it when they run."""
