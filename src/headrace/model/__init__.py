"""Networks: layers and blocks as frozen values with pure methods, and network families as rows of tables."""
