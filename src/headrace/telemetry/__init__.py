"""What a run reports: typed records, the files and the console they go to, clocks, reports and the plot of a run."""
