"""Schedules in time as text and as files."""
