"""Embedded parts: a broker and a store that start on one machine without Docker and without root."""
