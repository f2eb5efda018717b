//! Where the survivors of a plan go on from. No holder updates a slice before every holder has the step's reduced
//! gradient, so whoever knows a step's closing sums may have updated, and everyone else can: all go on to the next step.
//! Where nobody knows them nobody has updated, and all stay.

use crate::message::{Closing, Standing};

/// The one step, and the closing sums of the one before for those who are not there. Nothing where survivors are further
/// apart than rules allow: then only a checkpoint is one step for all.
pub fn agree(
    committed: u64,
    closing: Option<Closing>,
    standings: &[Standing],
) -> Option<(u64, Option<Closing>)> {
    let step = standings.iter().map(Standing::reaches).max()?.max(committed);
    let known = standings.iter().filter_map(|standing| standing.closing).chain(closing);
    let closing = known.into_iter().find(|closing| closing.step + 1 == step);
    let can_go = |standing: &Standing| match standing.step {
        at if at == step => !standing.applied,
        at => at + 1 == step && closing.is_some(),
    };
    standings.iter().all(can_go).then_some((step, closing))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closing(step: u64) -> Option<Closing> {
        Some(Closing { step, sums: [step; 4] })
    }

    #[test]
    fn one_who_knows_the_sums_takes_all_along() {
        let behind = Standing { step: 7, applied: false, closing: closing(6) };
        let partly = Standing { step: 7, applied: true, closing: closing(7) };
        let ahead = Standing { step: 8, applied: false, closing: closing(7) };
        assert_eq!(agree(7, None, &[behind, behind]), Some((7, closing(6))));
        assert_eq!(agree(7, None, &[behind, partly]), Some((8, closing(7))));
        assert_eq!(agree(7, None, &[ahead, behind]), Some((8, closing(7))));
        assert_eq!(
            agree(8, closing(7), &[behind]),
            Some((8, closing(7))),
            "the one who knew is dead, but told"
        );
    }

    #[test]
    fn what_cannot_be_is_not_made_up_for() {
        let (old, new) = (Standing::at(5), Standing::at(7));
        assert_eq!(agree(5, None, &[old, new]), None, "two steps apart");
        assert_eq!(agree(6, None, &[old]), None, "nobody knows the sums");
        assert_eq!(agree(5, None, &[]), None, "nobody is left");
    }
}
