//! How people name a place: a path, or a URL.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Where checkpoints lie, as a job names it.
#[derive(Clone, PartialEq, Eq)]
pub enum Location {
    Folder(PathBuf),
    /// An object store, and what the environment says about it.
    Objects {
        url: String,
        options: BTreeMap<String, String>,
    },
}

/// The schemes of object stores.
const SCHEMES: [&str; 4] = ["s3", "gs", "az", "abfss"];

/// What the environment's names of options begin with.
const OPTION_PREFIXES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

impl Location {
    /// Of a path, which counts from `base` if it is relative, or of a URL: `file:///…`, `s3://bucket/…`, `gs://bucket/…`,
    /// `az://container/…`. Of `environment` what concerns object stores is kept, credentials among it.
    pub fn parse(
        text: &str,
        base: &Path,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Location> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Location::Folder(base.join(text)));
        };
        // Nothing of a URL that may hold a secret is shown.
        let refuse =
            |reason: &str| Err(Error::Location { scheme: scheme.to_owned(), reason: reason.to_owned() });
        match scheme {
            "file" if rest.starts_with('/') => Ok(Location::Folder(rest.into())),
            "file" => refuse("a path after file:// begins with a slash"),
            _ if !SCHEMES.contains(&scheme) => refuse("it is none of file, s3, gs and az"),
            _ if rest.contains(['@', '?', '#']) && scheme != "abfss" => {
                refuse("credentials and options belong in the environment, not in the URL")
            }
            _ if !cfg!(feature = "object-store") => Err(Error::NoObjects { url: text.to_owned() }),
            _ => {
                let concerns = |(name, _): &(String, String)| {
                    OPTION_PREFIXES.iter().any(|prefix| name.to_ascii_uppercase().starts_with(prefix))
                };
                let options = environment.into_iter().filter(concerns).collect();
                Ok(Location::Objects { url: text.trim_end_matches('/').to_owned(), options })
            }
        }
    }

    /// What people read of it.
    pub fn shown(&self) -> String {
        match self {
            Location::Folder(path) => path.display().to_string(),
            Location::Objects { url, .. } => url.clone(),
        }
    }
}

impl std::fmt::Debug for Location {
    /// Without the options: there are secrets among them.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.shown())
    }
}
