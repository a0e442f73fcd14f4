"""`jenga doctor`: a machine, its packages and a model, examined before a server is started."""
