//! How commands find their controller, and in which form they tell what it says.

use std::path::PathBuf;

use shoal_service::access::{ACCESS_FILE, ACCESS_VARIABLE, Access, state_folder};
use shoal_service::client::Client;
use shoal_service::server::default_folder;

use crate::error::Result;

#[derive(clap::Args)]
pub struct Reach {
    /// The controller's address, where it is another than its access.json says
    #[arg(long, value_name = "URL")]
    pub controller: Option<String>,
    /// JSON in place of text; a line each where there is one event or step after the other
    #[arg(long)]
    pub json: bool,
}

impl Reach {
    pub fn client(&self) -> Result<Client> {
        client(self.controller.as_deref())
    }
}

pub fn client(url: Option<&str>) -> Result<Client> {
    let named = std::env::var_os(ACCESS_VARIABLE).map(PathBuf::from);
    let file = named.unwrap_or_else(|| default_folder(&state_folder()).join(ACCESS_FILE));
    Ok(Client::new(&Access::read(&file)?, url)?)
}
