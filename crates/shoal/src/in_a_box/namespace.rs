//! Links that the system shapes instead of the transport: a worker in a network namespace of its own, which whoever starts
//! the lab has made and joined with the others' (`cargo xtask bench namespaces` does).

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

/// A namespace of this machine, and the address a worker has in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Namespace {
    name: String,
    pub address: IpAddr,
}

impl FromStr for Namespace {
    type Err = String;

    fn from_str(text: &str) -> Result<Namespace, String> {
        let wanted = || format!("{text:?} is not NAME=ADDRESS, such as left=10.9.0.1");
        let (name, address) = text.split_once('=').ok_or_else(wanted)?;
        if name.is_empty() || name.starts_with('-') {
            return Err(wanted());
        }
        Ok(Namespace { name: name.to_owned(), address: address.parse().map_err(|_| wanted())? })
    }
}

impl Namespace {
    /// A program, begun inside of it: `ip` becomes that program, so its process and its pipes are the caller's.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_a_name_and_an_address() {
        let namespace: Namespace = "left=10.9.0.1".parse().expect("both are there");
        assert_eq!((namespace.name.as_str(), namespace.address.to_string()), ("left", "10.9.0.1".to_owned()));
        for wrong in ["left", "=10.9.0.1", "left=here", "-all=10.9.0.1"] {
            assert!(wrong.parse::<Namespace>().is_err(), "{wrong}");
        }
    }
}
