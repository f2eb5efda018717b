//! Every layer on every device: how many samples a device computes and how much state it keeps are decided separately.
