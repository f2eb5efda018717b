//! Azure's scheduled events: a list for the whole group of machines, in which this one is named if it is meant. Preempt
//! comes half a minute ahead at least; freezes pass, and are no reason to go. Its documentation says to ask every second.

use std::time::Duration;

use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc2822;

use super::{Notice, Notices, ask, status, text_of, until};
use crate::http::Target;

const FLAVOR: (&str, &str) = ("Metadata", "true");
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

pub struct Azure {
    target: Target,
    /// Of this machine.
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    #[serde(default)]
    events: Vec<Scheduled>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Scheduled {
    event_type: String,
    #[serde(default)]
    resources: Vec<String>,
    /// Empty once it has started.
    #[serde(default)]
    not_before: String,
}

impl Azure {
    pub fn new(target: Target) -> Azure {
        Azure { target, name: None }
    }

    fn name(&mut self) -> Result<String, String> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        let answer = ask(&self.target, "GET", NAME, &[FLAVOR])?;
        if answer.status != 200 {
            return Err(status(&answer));
        }
        let name = text_of(&answer)?.to_owned();
        self.name = Some(name.clone());
        Ok(name)
    }
}

impl Notices for Azure {
    fn cloud(&self) -> &'static str {
        "Azure"
    }

    fn every(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn poll(&mut self, now_ms: u64) -> Result<Option<Notice>, String> {
        let name = self.name()?;
        let answer = ask(&self.target, "GET", EVENTS, &[FLAVOR])?;
        if answer.status != 200 {
            return Err(status(&answer));
        }
        let document: Document = serde_json::from_slice(&answer.body).map_err(|error| error.to_string())?;
        let takes_away = |event: &&Scheduled| {
            matches!(event.event_type.as_str(), "Preempt" | "Terminate" | "Redeploy" | "Reboot")
                && event.resources.contains(&name)
        };
        let left = |event: &Scheduled| match event.not_before.is_empty() {
            true => Ok(0),
            false => OffsetDateTime::parse(&event.not_before, &Rfc2822)
                .map(|moment| until(moment, now_ms))
                .map_err(|error| format!("{:?}: {error}", event.not_before)),
        };
        let soonest: Result<Vec<u64>, String> = document.events.iter().filter(takes_away).map(left).collect();
        Ok(soonest?.into_iter().min().map(|in_ms| Notice { in_ms }))
    }
}
