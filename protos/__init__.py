"""The wire: .proto files, their stubs, and the one way every service is served."""

import os

# gRPC's core logs every connection that ends; what matters is in our own logs.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
