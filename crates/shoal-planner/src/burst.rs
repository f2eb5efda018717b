//! To each layer the number of devices that suits it, under a budget of device-seconds.
