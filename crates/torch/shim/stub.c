// Empty: libtorch_stub.so has a name, and nothing in it.
