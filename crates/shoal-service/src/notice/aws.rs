//! EC2's instance metadata, version 2: a token first, then the spot instance action, which is not there until the
//! instance is to be stopped, hibernated or terminated, two minutes ahead. Its documentation says to ask every five seconds.

use std::time::Duration;

use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{Notice, Notices, ask, status, text_of, until};
use crate::http::Target;

const TOKEN_SECONDS: &str = "21600";

pub struct Aws {
    target: Target,
    token: Option<String>,
}

#[derive(Deserialize)]
struct Action {
    time: String,
}

impl Aws {
    pub fn new(target: Target) -> Aws {
        Aws { target, token: None }
    }

    fn token(&mut self) -> Result<String, String> {
        if let Some(token) = &self.token {
            return Ok(token.clone());
        }
        let lasting = ("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_SECONDS);
        let answer = ask(&self.target, "PUT", "/latest/api/token", &[lasting])?;
        if answer.status != 200 {
            return Err(status(&answer));
        }
        let token = text_of(&answer)?.to_owned();
        self.token = Some(token.clone());
        Ok(token)
    }
}

impl Notices for Aws {
    fn cloud(&self) -> &'static str {
        "AWS"
    }

    fn every(&self) -> Duration {
        Duration::from_secs(5)
    }

    fn poll(&mut self, now_ms: u64) -> Result<Option<Notice>, String> {
        let token = self.token()?;
        let shown = ("X-aws-ec2-metadata-token", token.as_str());
        let answer = ask(&self.target, "GET", "/latest/meta-data/spot/instance-action", &[shown])?;
        match answer.status {
            200 => {}
            404 => return Ok(None),
            other => {
                // A token that has expired is asked for anew next time.
                self.token = self.token.take().filter(|_| other != 401);
                return Err(status(&answer));
            }
        }
        let action: Action = serde_json::from_slice(&answer.body).map_err(|error| error.to_string())?;
        let moment = OffsetDateTime::parse(&action.time, &Rfc3339).map_err(|error| error.to_string())?;
        Ok(Some(Notice { in_ms: until(moment, now_ms) }))
    }
}
