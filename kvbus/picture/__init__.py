"""The cluster as a picture: what facts, heartbeats and the registry come to, for whoever shows it to people."""
