//! Join tokens: what lets one machine into the fleet, once, within a while. A token carries the hash of the authority's
//! certificate, so that whoever has it knows the controller from the first byte.
//!
//! What was used stays used: the roll is on the disk before an answer leaves. Of a token's secret it keeps a hash.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Refusal, Result};
use crate::folder::Folder;
use crate::secret::Secret;
use crate::tls::CONTROLLER;

const FILE: &str = "tokens.json";
const PREFIX: &str = "shoal1";
const SECRET_BYTES: usize = 16;

/// How long tokens that are used up or expired are remembered, so that a refusal can say which.
const REMEMBERED_MS: u64 = 24 * 3_600_000;
/// At most so many are open at a time.
const OPEN_MAX: usize = 10_000;
pub const MINUTES_MAX: u64 = 7 * 24 * 60;

/// As it is pasted.
#[derive(Clone, Debug)]
pub struct JoinToken {
    pub authority: blake3::Hash,
    pub id: u64,
    pub secret: Secret,
}

/// With the secret: this is what is shown to whoever made it.
impl fmt::Display for JoinToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}.{}.{:x}.{}", self.authority.to_hex(), self.id, self.secret.expose())
    }
}

impl FromStr for JoinToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<JoinToken> {
        let parts: Vec<&str> = text.trim().split('.').collect();
        let [PREFIX, authority, id, secret] = parts[..] else { return Err(Error::TokenText) };
        let is_hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if secret.len() != 2 * SECRET_BYTES || !is_hexadecimal(secret) || !is_hexadecimal(id) {
            return Err(Error::TokenText);
        }
        let authority = blake3::Hash::from_hex(authority).map_err(|_| Error::TokenText)?;
        let id = u64::from_str_radix(id, 16).map_err(|_| Error::TokenText)?;
        Ok(JoinToken { authority, id, secret: Secret::from_text(secret) })
    }
}

/// A token as the controller remembers it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Issued {
    id: u64,
    secret_hash: String,
    expires_ms: u64,
    /// The one name it is for. Such a token may give a name anew that a machine has had before.
    worker: Option<String>,
    used: bool,
}

/// Every token that counts, and every name that was given out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roll {
    tokens: Vec<Issued>,
    last: u64,
    names: BTreeSet<String>,
}

impl Roll {
    pub fn read(folder: &Folder) -> Result<Roll> {
        let Some(text) = folder.read(FILE)? else { return Ok(Roll::default()) };
        serde_json::from_str(&text)
            .map_err(|error| Error::Content { path: folder.path().join(FILE), cause: error.to_string() })
    }

    fn write(&self, folder: &Folder) -> Result {
        folder.write(FILE, &serde_json::to_string(self).expect("a roll is JSON"))
    }

    /// Makes a token that is good for a while, for whoever comes first or for one name.
    pub fn make(
        &mut self,
        folder: &Folder,
        authority: blake3::Hash,
        now_ms: u64,
        minutes: u64,
        worker: Option<&str>,
    ) -> Result<(JoinToken, u64)> {
        if minutes == 0 || minutes > MINUTES_MAX {
            let message = format!("a token is good for 1 to {MINUTES_MAX} minutes, not {minutes}");
            return Err(Refusal::new(400, "token_minutes", message).into());
        }
        if let Some(name) = worker {
            check_name(name)?;
        }
        self.tokens.retain(|token| now_ms < token.expires_ms + REMEMBERED_MS);
        if self.tokens.len() >= OPEN_MAX {
            return Err(Refusal::new(429, "too_many_tokens", "there are too many tokens").into());
        }
        let secret = Secret::random(SECRET_BYTES)?;
        let (id, expires_ms) = (self.last + 1, now_ms + minutes * 60_000);
        let secret_hash = secret.hash().to_hex().to_string();
        let worker = worker.map(str::to_owned);
        self.last = id;
        self.tokens.push(Issued { id, secret_hash, expires_ms, worker, used: false });
        self.write(folder)?;
        Ok((JoinToken { authority, id, secret }, expires_ms))
    }

    /// Uses a token up for a name: on the disk before this returns. Whoever has no token learns nothing about names.
    pub fn use_up(&mut self, folder: &Folder, token: &JoinToken, name: &str, now_ms: u64) -> Result {
        self.check(token, now_ms)?;
        check_name(name)?;
        let issued = self.tokens.iter_mut().find(|issued| issued.id == token.id);
        let issued = issued.ok_or_else(unknown)?;
        match &issued.worker {
            Some(worker) if worker != name => {
                let message = format!("this token is for a worker named {worker}, not {name}");
                return Err(Refusal::new(403, "token_for_another", message)
                    .hint("name it so with --name")
                    .into());
            }
            None if self.names.contains(name) => return Err(taken(name).into()),
            _ => {}
        }
        issued.used = true;
        self.names.insert(name.to_owned());
        self.write(folder)
    }

    /// Whether a token would be taken.
    pub fn check(&self, token: &JoinToken, now_ms: u64) -> std::result::Result<(), Refusal> {
        let issued = self.tokens.iter().find(|issued| issued.id == token.id).ok_or_else(unknown)?;
        let kept = blake3::Hash::from_hex(&issued.secret_hash).map_err(|_| unknown())?;
        if kept != token.secret.hash() {
            return Err(unknown());
        }
        let again = "`shoal token` makes another";
        if issued.used {
            return Err(Refusal::new(401, "token_used", "this token has been used").hint(again));
        }
        if now_ms >= issued.expires_ms {
            return Err(Refusal::new(401, "token_expired", "this token has expired").hint(again));
        }
        Ok(())
    }
}

fn unknown() -> Refusal {
    Refusal::new(401, "token_unknown", "this controller has not made this token")
        .hint("paste the whole of it; `shoal token` makes another")
}

fn taken(name: &str) -> Refusal {
    Refusal::new(409, "name_taken", format!("a worker named {name} has joined before")).hint(format!(
        "choose another with --name, or make a token for it with `shoal token --worker {name}`"
    ))
}

/// Letters, digits and hyphens: without dots it can be no host's name and not the controller's.
pub fn check_name(name: &str) -> std::result::Result<(), Refusal> {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let whole = (1..=63).contains(&name.len()) && name.bytes().all(good);
    // A name of digits alone could be read as an address.
    let letter = name.bytes().any(|byte| byte.is_ascii_lowercase());
    if whole
        && letter
        && !name.starts_with('-')
        && !name.ends_with('-')
        && name != "localhost"
        && name != CONTROLLER
    {
        return Ok(());
    }
    Err(Refusal::new(400, "name", "workers' names are small letters, digits and hyphens, 63 at most")
        .hint("choose one with --name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(result: Result) -> String {
        match result {
            Err(Error::Refused(refusal)) => refusal.code,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn a_token_serves_once_within_its_time_also_after_a_restart() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = Folder::open(parent.path()).expect("it opens");
        let authority = blake3::hash(b"authority");
        let mut roll = Roll::default();
        let (token, expires_ms) = roll.make(&folder, authority, 1_000, 1, None).expect("a token");
        let token: JoinToken = token.to_string().parse().expect("it reads back");
        assert_eq!((token.authority, expires_ms), (authority, 61_000));
        let forged = JoinToken { secret: Secret::random(16).expect("randomness"), ..token.clone() };
        assert_eq!(code(roll.use_up(&folder, &forged, "one", 2_000)), "token_unknown");
        assert_eq!(code(roll.use_up(&folder, &token, "one.two", 2_000)), "name");
        assert_eq!(code(roll.use_up(&folder, &token, "one", 61_000)), "token_expired");
        roll.use_up(&folder, &token, "one", 2_000).expect("its first use");
        assert_eq!(code(roll.use_up(&folder, &token, "two", 2_000)), "token_used");

        let mut roll = Roll::read(&folder).expect("the roll");
        assert_eq!(code(roll.use_up(&folder, &token, "two", 2_000)), "token_used");
        let (second, _) = roll.make(&folder, authority, 2_000, 1, None).expect("a token");
        assert_eq!(code(roll.use_up(&folder, &second, "one", 2_000)), "name_taken");
        let (renewal, _) = roll.make(&folder, authority, 2_000, 1, Some("one")).expect("a token");
        assert_eq!(code(roll.use_up(&folder, &renewal, "two", 2_000)), "token_for_another");
        roll.use_up(&folder, &renewal, "one", 2_000).expect("the name's own token");
        let kept = folder.read(FILE).expect("it reads").expect("it is there");
        assert!(!kept.contains(token.secret.expose()));
    }

    #[test]
    fn names_are_labels() {
        for good in ["a", "gpu-1", "7b"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "1", "localhost", "a b", "ä", &"a".repeat(64)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
