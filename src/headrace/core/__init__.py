"""Ground floor: errors, named trees, units and addressed randomness. Imports no other room."""
