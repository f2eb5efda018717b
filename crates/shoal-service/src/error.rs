//! What can go wrong between a controller, its workers and the commands, with what to do about it.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use shoal_control::log::LogError;
use shoal_control::settings::SettingsError;
use thiserror::Error;

pub type Result<T = ()> = std::result::Result<T, Error>;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path}: it is not what was written there: {cause}")]
    Content { path: PathBuf, cause: String },
    #[error("{path}: another process uses this folder")]
    InUse { path: PathBuf },
    #[error("{address}: cannot listen there: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Identity(#[from] shoal_net::Error),
    #[error("the system gives no random numbers")]
    Random,
    #[error("`{url}` is no address of a controller")]
    Url { url: String },
    #[error("this is no join token")]
    TokenText,
    #[error("the token was made by another fleet's controller than the one at {url}")]
    TokenOfOtherFleet { url: String },
    #[error("the controller at {url} is not the one that this access belongs to")]
    OtherFleet { url: String },
    #[error("no controller answers at {url}: {cause}")]
    Unreachable { url: String, cause: String },
    #[error("{}", .0.message)]
    Refused(Refusal),
    #[error("{url} answers, but not as a controller does: {cause}")]
    Answer { url: String, cause: String },
    #[error("no fleet is known here: there is no {path}")]
    NoAccess { path: PathBuf },
    #[error("this machine is no member of a fleet yet: there is no identity in {path}")]
    NoIdentity { path: PathBuf },
    #[error("the controller's settings have changed since this worker joined")]
    NewSettings,
    #[error("the controller stopped: {0}")]
    Stopped(String),
}

/// A controller's no, as it travels.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Refusal {
    /// Of HTTP.
    #[serde(skip)]
    pub status: u16,
    /// The same for the same cause, for programs.
    pub code: String,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hint: Option<String>,
}

impl Refusal {
    pub fn new(status: u16, code: &str, message: impl Into<String>) -> Refusal {
        Refusal { status, code: code.into(), message: message.into(), hint: None }
    }

    pub fn hint(self, hint: impl Into<String>) -> Refusal {
        Refusal { hint: Some(hint.into()), ..self }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        Error::Refused(refusal)
    }
}

impl Error {
    /// For `map_err`: an error of the file system with its path.
    pub fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
        let path = path.to_owned();
        move |source| Error::File { path, source }
    }

    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::File { .. } => "check that the path exists and can be read and written",
            Error::Content { .. } => "restore the file, or begin with another folder",
            Error::InUse { .. } => "stop that process, or choose another folder with --folder",
            Error::Listen { .. } => "choose another address with --listen",
            Error::Log(error) => error.hint(),
            Error::Settings(_) => "lengthen the deadline or shorten the lease",
            Error::Identity(error) => return error.hint().map(str::to_owned),
            Error::Random => return None,
            Error::Url { .. } => "it looks like https://HOST:PORT, as `shoal up` prints it",
            Error::TokenText => "paste the whole of it, as `shoal up` or `shoal token` prints it",
            Error::TokenOfOtherFleet { .. } => "check the address, or make a token there with `shoal token`",
            Error::OtherFleet { .. } => {
                "check the address; the controller's access.json, copied here and named by SHOAL_ACCESS, is what \
                 commands need"
            }
            Error::Unreachable { .. } => "is `shoal up` running, and can that address be reached from here?",
            Error::Refused(refusal) => return refusal.hint.clone(),
            Error::Answer { .. } => "check the address, and that both sides are of one version",
            Error::NoAccess { .. } => {
                "start a controller with `shoal up`, or name a fleet's access.json by SHOAL_ACCESS"
            }
            Error::NoIdentity { .. } => {
                "join with `shoal join URL --token TOKEN`; `shoal token` makes a token"
            }
            Error::NewSettings => "start this worker again",
            Error::Stopped(_) => "see its messages, and start it again: it goes on from its log",
        };
        Some(hint.to_owned())
    }
}
