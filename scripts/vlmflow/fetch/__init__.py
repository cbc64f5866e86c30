"""What comes from elsewhere: pins, the hub, downloads that go on, model folders."""
