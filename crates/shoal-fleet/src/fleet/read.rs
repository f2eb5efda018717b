use super::Fleet;
use crate::error::Result;

pub(super) fn fleet(text: &str, name: &str) -> Result<Fleet> {
    todo!("{text}{name}")
}
