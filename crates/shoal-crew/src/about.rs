//! What a worker says of itself when it joins. Controllers pass it on unread; planners make a fleet of it, and peers find
//! the worker by it.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::error::CrewError;

/// In messages, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// What its certificate calls it.
    pub name: String,
    /// Where peers reach it.
    pub address: SocketAddr,
    /// Workers with the same are on one machine, and lost together.
    pub machine: String,
    pub device: DeviceAbout,
    /// Bytes of the host's memory that state may lie in.
    pub host_memory_bytes: u64,
    /// Bytes of disk that state may lie on; none where it may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Of its network, where that is known: bytes a second, and seconds of latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<(f64, f64)>,
    /// Of its machine, which all its workers share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
    /// Between two workers of its machine while nothing else went on, where that was measured: bytes of a message, rising, and
    /// the bytes a second that it moved at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub within_machine: Vec<(u64, f64)>,
    /// What it costs, and whether it may be taken away at any moment.
    #[serde(default)]
    pub dollars_per_hour: f64,
    #[serde(default)]
    pub spot: bool,
    /// Whether the fleet's owner may order faults on it.
    #[serde(default)]
    pub drills: bool,
    /// It plays its device and its network, and so many times slower than they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stretch: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceAbout {
    /// As profiles and the catalogue know it.
    pub kind: String,
    /// The most bytes that plans may use of its own memory.
    pub memory_bytes: u64,
    /// Bytes that it takes for itself, whatever it runs.
    pub workspace_bytes: u64,
    /// Of the processor, where the device is one, or beside it.
    pub threads: usize,
    /// Operations a second that it was measured to reach in matrix products of fp32, where it is of a kind whose machines
    /// differ: a processor with its threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix_flops_per_second: Option<f64>,
    /// The precisions that it computes in, as job files write them.
    pub precisions: Vec<String>,
}

impl About {
    pub fn parse(text: &str) -> Result<About, CrewError> {
        serde_json::from_str(text).map_err(|error| CrewError::About { what: error.to_string() })
    }

    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("plain data is JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_as_it_was_and_nonsense_is_refused() {
        let about = About {
            name: "worker-1".into(),
            address: "127.0.0.1:4000".parse().unwrap(),
            machine: "here".into(),
            device: DeviceAbout {
                kind: "cpu".into(),
                memory_bytes: 1 << 30,
                workspace_bytes: 1 << 20,
                threads: 2,
                matrix_flops_per_second: Some(1e11),
                precisions: vec!["fp32".into()],
            },
            host_memory_bytes: 1 << 31,
            disk_bytes: None,
            network: Some((1e9, 1e-4)),
            cores: Some(8),
            within_machine: vec![(1024, 1e7), (1 << 20, 1e9)],
            dollars_per_hour: 0.5,
            spot: true,
            drills: true,
            stretch: Some(2.5),
        };
        assert_eq!(About::parse(&about.text()).unwrap(), about);
        for text in ["", "{}", "7", &about.text().replace("127.0.0.1", "nowhere")] {
            assert!(About::parse(text).is_err(), "{text}");
        }
    }
}
