//! What a command needs to talk to a controller: where it is, the token, and the authority it is known by. `shoal up`
//! writes it into its folder, for its owner's eyes only; whoever copies it to another machine may command from there.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::folder;
use crate::http::Target;
use crate::secret::Secret;

pub const ACCESS_FILE: &str = "access.json";
/// Names another file than the one in the default folder.
pub const ACCESS_VARIABLE: &str = "SHOAL_ACCESS";

#[derive(Clone, Debug)]
pub struct Access {
    pub url: String,
    pub token: Secret,
    /// Its certificate.
    pub authority: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    url: String,
    token: String,
    authority: String,
}

impl Access {
    /// With the secret.
    pub fn to_text(&self) -> String {
        let Access { url, token, authority } = self.clone();
        let text = Text { url, token: token.expose().to_owned(), authority };
        serde_json::to_string_pretty(&text).expect("an access is JSON")
    }

    pub fn read(path: &Path) -> Result<Access> {
        let text = folder::read(path)?.ok_or_else(|| Error::NoAccess { path: path.into() })?;
        let Text { url, token, authority } = serde_json::from_str(&text)
            .map_err(|error| Error::Content { path: path.into(), cause: error.to_string() })?;
        url.parse::<Target>()?;
        Ok(Access { url, token: Secret::from_text(&token), authority })
    }
}

/// Where this user's fleets and memberships are kept.
pub fn state_folder() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || set("HOME").map(|home| home.join(".local/state"));
    set("XDG_STATE_HOME").or_else(home).unwrap_or_else(std::env::temp_dir).join("shoal")
}
