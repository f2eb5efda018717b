//! Clouds say before they take a machine away: half a minute to two, to those who ask. Each has its own way, over plain HTTP
//! at an address that only the machine itself reaches; here they are one trait.

mod aws;
mod azure;
mod gcp;

use std::path::Path;
use std::str::FromStr;
use std::sync::mpsc::Sender;
use std::time::Duration;

use time::OffsetDateTime;

use crate::clock::unix_ms;
use crate::http::{Answer, Call, Failure, Target, block_on, exchange};
use crate::worker_driver::Happening;

pub use aws::Aws;
pub use azure::Azure;
pub use gcp::Gcp;

/// Where all three have their metadata.
const METADATA: &str = "http://169.254.169.254:80";
const PATIENCE: Duration = Duration::from_secs(3);
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// That this machine will be taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    pub in_ms: u64,
}

/// One cloud's way of saying it.
pub trait Notices: Send {
    fn cloud(&self) -> &'static str;
    /// How often its documentation wants it to be asked.
    fn every(&self) -> Duration;
    /// Asks once. `now_ms` is the time since 1970, which notices are told in.
    fn poll(&mut self, now_ms: u64) -> Result<Option<Notice>, String>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cloud {
    Aws,
    Gcp,
    Azure,
}

impl Cloud {
    /// By what the machine's firmware says of its maker.
    pub fn here() -> Option<Cloud> {
        let read = |name: &str| std::fs::read_to_string(Path::new("/sys/class/dmi/id").join(name)).ok();
        Cloud::of_vendor(read("sys_vendor")?.trim(), read("chassis_asset_tag").unwrap_or_default().trim())
    }

    fn of_vendor(vendor: &str, asset_tag: &str) -> Option<Cloud> {
        // Microsoft also makes machines that stand on desks; this number is the one that its cloud's bear.
        const AZURE_TAG: &str = "7783-7084-3265-9085-8269-3286-77";
        match vendor {
            "Amazon EC2" => Some(Cloud::Aws),
            "Google" => Some(Cloud::Gcp),
            "Microsoft Corporation" if asset_tag == AZURE_TAG => Some(Cloud::Azure),
            _ => None,
        }
    }

    /// `metadata` for tests, which have a server of their own.
    pub fn notices(self, metadata: Option<Target>) -> Box<dyn Notices> {
        let target = metadata.unwrap_or_else(|| METADATA.parse().expect("it is a target"));
        match self {
            Cloud::Aws => Box::new(Aws::new(target)),
            Cloud::Gcp => Box::new(Gcp::new(target)),
            Cloud::Azure => Box::new(Azure::new(target)),
        }
    }
}

impl FromStr for Cloud {
    type Err = String;

    fn from_str(text: &str) -> Result<Cloud, String> {
        match text {
            "aws" => Ok(Cloud::Aws),
            "gcp" => Ok(Cloud::Gcp),
            "azure" => Ok(Cloud::Azure),
            other => Err(format!("`{other}` is none of aws, gcp, azure")),
        }
    }
}

/// Asks until there is a notice or nobody wants to know any more.
pub fn watch(mut notices: Box<dyn Notices>, happenings: Sender<Happening>, complaints: crate::Complaints) {
    std::thread::spawn(move || {
        let mut complained = false;
        loop {
            match notices.poll(unix_ms()) {
                Ok(Some(Notice { in_ms })) => {
                    let why = format!("{} takes this machine away", notices.cloud());
                    let _ = happenings.send(Happening::Notice { in_ms, why });
                    return;
                }
                Ok(None) => complained = false,
                Err(why) if !complained => {
                    complained = true;
                    complaints(&format!("{}'s metadata cannot be asked: {why}", notices.cloud()));
                }
                Err(_) => {}
            }
            std::thread::sleep(notices.every());
        }
    });
}

/// One question to a metadata service.
fn ask(target: &Target, method: &str, path: &str, headers: &[(&str, &str)]) -> Result<Answer, String> {
    let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    let call = Call {
        method,
        path,
        headers,
        body: Vec::new(),
        within: PATIENCE,
        answer_bytes_max: ANSWER_BYTES_MAX,
    };
    let answer = block_on(exchange(target, None, call)).map_err(|error| error.to_string())?;
    answer.map_err(|failure| match failure {
        Failure::Unreachable(why) => why,
        Failure::Stranger => "it is somebody else".into(),
    })
}

fn text_of(answer: &Answer) -> Result<&str, String> {
    std::str::from_utf8(&answer.body).map(str::trim).map_err(|error| error.to_string())
}

fn status(answer: &Answer) -> String {
    format!("it answered with status {}", answer.status)
}

/// What is left until a moment.
fn until(moment: OffsetDateTime, now_ms: u64) -> u64 {
    let at_ms = moment.unix_timestamp_nanos() / 1_000_000;
    u64::try_from(at_ms - i128::from(now_ms)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_known_by_their_makers() {
        assert_eq!(Cloud::of_vendor("Amazon EC2", ""), Some(Cloud::Aws));
        assert_eq!(Cloud::of_vendor("Google", ""), Some(Cloud::Gcp));
        assert_eq!(
            Cloud::of_vendor("Microsoft Corporation", "7783-7084-3265-9085-8269-3286-77"),
            Some(Cloud::Azure)
        );
        assert_eq!(Cloud::of_vendor("Microsoft Corporation", "a desk"), None);
        assert_eq!(Cloud::of_vendor("QEMU", ""), None);
    }
}
