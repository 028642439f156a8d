"""Generated messages and stubs of the services."""
