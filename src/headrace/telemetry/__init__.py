"""What a run tells: typed records, the files and the console they go to, clocks, reports and the picture of a run."""
