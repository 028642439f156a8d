"""The wire: .proto files, their stubs, and the one way every service is served."""
