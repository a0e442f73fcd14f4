"""`jenga doctor`: examine a machine, its packages and a model before a server is started."""
