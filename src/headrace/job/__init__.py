"""A job of several processes: launching them, finding one's place, meeting, control messages, liveness."""
