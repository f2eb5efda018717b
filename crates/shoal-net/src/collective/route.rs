//! Which way a collective goes, by its members and its bytes alone: so all members agree, and whoever foresees what one takes,
//! as the simulator does, asks here too.

use super::Wire;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Everyone sends to everyone, all at once.
    Direct,
    /// Everyone sends to the next, and what comes goes on.
    Ring,
    /// Up to the first member, and down again.
    Tree,
    /// Everyone sends each owner its share, one owner after the other.
    Pairwise,
}

/// Among so many everyone sends a few numbers to everyone, which takes one exchange; among more that would be too many messages.
pub(super) const DIRECT_MAX: usize = 4;

impl Route {
    /// Of gathering a buffer of so many bytes. Between two the ring is one exchange, and a tree is two.
    pub fn of_gathering(members: usize, bytes: usize, tree_bytes_max: usize) -> Route {
        if members > 2 && bytes <= tree_bytes_max { Route::Tree } else { Route::Ring }
    }

    /// Of adding up a buffer of so many bytes, each member's slice at that member.
    pub fn of_adding(members: usize, bytes: usize, wire: Wire, tree_bytes_max: usize) -> Route {
        match wire {
            Wire::Bf16 => Route::Pairwise,
            Wire::F32 => Route::of_gathering(members, bytes, tree_bytes_max),
        }
    }

    /// Of the sum of a few numbers.
    pub fn of_numbers(members: usize) -> Route {
        if members <= DIRECT_MAX { Route::Direct } else { Route::Tree }
    }
}
