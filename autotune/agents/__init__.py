"""Autotune for agents: a server of the Model Context Protocol on the client of a service."""
