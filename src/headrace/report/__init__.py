"""Reports: what a run directory says about its run, as summaries, pages and a live server."""
