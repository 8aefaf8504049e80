"""Tables, connections, and every statement that Nightmill sends to the database."""
