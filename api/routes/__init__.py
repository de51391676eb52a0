"""The routes of the service, a module for each kind of thing."""
