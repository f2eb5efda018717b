use super::Profile;
use crate::error::Result;

pub(super) fn profiles(one: Profile, other: Profile) -> Result<Profile> {
    todo!("{one:?}{other:?}")
}
