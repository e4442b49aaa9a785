"""What all other rooms may use: errors, files, named trees, units, counter-based randomness. Imports no other room."""
