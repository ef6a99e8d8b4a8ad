"""Models of several series at once, of their seasons and of trends that end in a failure."""
