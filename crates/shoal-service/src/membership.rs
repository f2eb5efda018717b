//! How a machine becomes a worker of a fleet, once: it makes a key, shows a token and gets a certificate for its name. What
//! it got is kept in a folder of its own, so that it is the same worker when it comes back.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_net::identity::{Applicant, Identity};

use crate::api::{JoinAnswer, JoinRequest, refusal_of};
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::http::{Call, Failure, Target, block_on, exchange};
use crate::tls;
use crate::token::{JoinToken, check_name};

const FILE: &str = "membership.json";
const PATIENCE: Duration = Duration::from_secs(15);
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A worker's place in a fleet.
pub struct Membership {
    pub name: String,
    pub target: Target,
    pub identity: Identity,
    /// Its folder, which nobody else may use meanwhile.
    pub folder: Folder,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    url: String,
    certificate: String,
    key: String,
    authority: String,
}

impl Membership {
    /// The membership that the folder has, or a new one for the token. A token of the fleet that this machine is in
    /// already is not used up.
    pub fn open(path: &Path, url: &str, token: Option<&JoinToken>, name: &str) -> Result<Membership> {
        let target: Target = url.parse()?;
        if !target.tls {
            return Err(Error::Url { url: url.to_owned() });
        }
        let folder = Folder::open(path)?;
        let known = read(&folder)?;
        let of_this_fleet = |text: &Text| -> Result<bool> {
            let Some(token) = token else { return Ok(true) };
            Ok(tls::authority_hash(&text.authority)? == token.authority && text.name == name)
        };
        if let Some(text) = known
            && of_this_fleet(&text)?
        {
            let identity = Identity::from_pem(&text.certificate, &text.key, &text.authority)?;
            let membership = Membership { name: text.name, target, identity, folder };
            membership.write()?;
            return Ok(membership);
        }
        let Some(token) = token else { return Err(Error::NoIdentity { path: path.into() }) };
        let identity = join(&target, token, name)?;
        let membership = Membership { name: name.to_owned(), target, identity, folder };
        membership.write()?;
        Ok(membership)
    }

    fn write(&self) -> Result {
        let text = Text {
            name: self.name.clone(),
            url: self.target.to_string(),
            certificate: self.identity.certificate_pem().to_owned(),
            key: self.identity.key_pem().to_owned(),
            authority: self.identity.authority_pem().to_owned(),
        };
        self.folder.write(FILE, &serde_json::to_string_pretty(&text).expect("a membership is JSON"))
    }
}

fn read(folder: &Folder) -> Result<Option<Text>> {
    let Some(text) = folder.read(FILE)? else { return Ok(None) };
    let wrong = |error: serde_json::Error| Error::Content {
        path: folder.path().join(FILE),
        cause: error.to_string(),
    };
    serde_json::from_str(&text).map(Some).map_err(wrong)
}

/// The token's hash tells whether the one who answers is the one who made it, before anything secret is said.
pub fn join(target: &Target, token: &JoinToken, name: &str) -> Result<Identity> {
    check_name(name)?;
    let applicant = Applicant::new()?;
    let request = JoinRequest { name: name.to_owned(), request: applicant.request_pem()? };
    let call = Call {
        method: "POST",
        path: "/api/v1/join",
        headers: vec![
            ("authorization", format!("Bearer {token}")),
            ("content-type", "application/json".to_owned()),
        ],
        body: serde_json::to_vec(&request).expect("a request is JSON"),
        within: PATIENCE,
        answer_bytes_max: ANSWER_BYTES_MAX,
    };
    let url = target.to_string();
    let tls = tls::pinned(token.authority)?;
    let no_runtime =
        |error: std::io::Error| Error::Unreachable { url: url.clone(), cause: error.to_string() };
    let answer = block_on(exchange(target, Some(&tls), call)).map_err(no_runtime)?;
    let answer = answer.map_err(|failure| match failure {
        Failure::Stranger => Error::TokenOfOtherFleet { url: url.clone() },
        other => other.at(target),
    })?;
    if answer.status != 200 {
        return Err(refusal_of(answer.status, &answer.body).into());
    }
    let wrong = |cause: String| Error::Answer { url: url.clone(), cause };
    let answer: JoinAnswer =
        serde_json::from_slice(&answer.body).map_err(|error| wrong(error.to_string()))?;
    if tls::authority_hash(&answer.authority)? != token.authority {
        return Err(wrong("its authority is not the token's".into()));
    }
    Ok(applicant.admitted(&answer.certificate, &answer.authority)?)
}
