//! Values where the next layer cuts the samples otherwise: an output is handed on in the pieces in which it is taken, and
//! what arrives in pieces is put together. Where nothing is cut, tensors change hands and nothing is copied.

use shoal_kernels::{Mat, MatMut, Tensor};
use shoal_nn::layer::element;
use shoal_plan::Samples;
use shoal_plan::effects::Value;

use super::Executor;
use super::step::{Step, Stored};
use crate::error::Result;

impl Step<'_> {
    /// The pieces in which these samples pass to or from a layer, and whether each is this device's there.
    fn pieces(&self, layer: usize, samples: Samples) -> Vec<(Samples, bool)> {
        match self.layout {
            None => vec![(samples, true)],
            Some(layout) => {
                layout.pieces(layer, samples).map(|(piece, device)| (piece, device == self.device)).collect()
            }
        }
    }
}

impl Executor {
    /// The outputs of earlier layers that a layer takes.
    pub(super) fn take_inputs(&self, step: &mut Step, layer: usize, samples: Samples) -> Result<Vec<Tensor>> {
        let inputs = self.chain.layers[layer].inputs.iter();
        inputs.map(|from| self.take_input(step, layer, *from, samples)).collect()
    }

    /// One of them.
    pub(super) fn take_input(
        &self,
        step: &mut Step,
        layer: usize,
        from: usize,
        samples: Samples,
    ) -> Result<Tensor> {
        self.take_whole(step, from, from, samples, |samples| Value::Activation {
            layer: from,
            reader: layer,
            samples,
        })
    }

    /// A layer's output or its gradient, of which the other layer has these pieces.
    fn take_whole(
        &self,
        step: &mut Step,
        layer: usize,
        other: usize,
        samples: Samples,
        value: impl Fn(Samples) -> Value,
    ) -> Result<Tensor> {
        let pieces = step.pieces(other, samples);
        if let [(only, _)] = &pieces[..] {
            return Ok(step.take_tensor(value(*only)));
        }
        let mut whole = self.boundary(layer, samples)?;
        let each = whole.len() / samples.count();
        for (piece, _) in pieces {
            let part = step.take_tensor(value(piece));
            let into = MatMut::new(&mut whole, samples.count(), each);
            let rows = into.rows(piece.start - samples.start, piece.count());
            self.device.set_rows(Some(Mat::new(&part, piece.count(), each)), rows)?;
        }
        Ok(whole)
    }

    /// Room for a layer's output.
    pub(super) fn boundary(&self, layer: usize, samples: Samples) -> Result<Tensor> {
        let elements = samples.count() * self.chain.layers[layer].kind.output_elements(self.sequence);
        let who = format!("the output of layer {layer}, {samples}");
        Ok(Tensor::of(self.device.arena(), &who, element(self.state.precision), elements)?)
    }

    /// The output for every reader. Readers here that take it whole share it, and only read it; what is sent while
    /// others read it is a copy, since either may be done first.
    pub(super) fn hand_on(&self, step: &mut Step, layer: usize, samples: Samples, output: Tensor) -> Result {
        let readers: Vec<usize> = self.chain.readers(layer).collect();
        for reader in &readers {
            for (piece, here) in step.pieces(*reader, samples) {
                let value = match piece == samples && (here || readers.len() == 1) {
                    true => output.share(),
                    false => self.cut(layer, &output, samples, piece)?,
                };
                step.put(Value::Activation { layer, reader: *reader, samples: piece }, Stored::Tensor(value));
            }
        }
        Ok(())
    }

    /// The gradients of a layer's inputs, to the layers that made them.
    pub(super) fn hand_back(
        &self,
        step: &mut Step,
        layer: usize,
        samples: Samples,
        gradients: Vec<Tensor>,
    ) -> Result {
        for (from, gradient) in self.chain.layers[layer].inputs.iter().zip(gradients) {
            let value = |samples| Value::Gradient { layer: *from, reader: layer, samples };
            let pieces = step.pieces(*from, samples);
            if let [(only, _)] = &pieces[..] {
                step.put(value(*only), Stored::Tensor(gradient));
                continue;
            }
            for (piece, _) in pieces {
                let part = self.cut(*from, &gradient, samples, piece)?;
                step.put(value(piece), Stored::Tensor(part));
            }
        }
        Ok(())
    }

    /// The gradient of a layer's output, added up over its readers in their order; none for the last layer.
    pub(super) fn merge(&self, step: &mut Step, layer: usize, samples: Samples) -> Result<Option<Tensor>> {
        let mut sum: Option<Tensor> = None;
        for reader in self.chain.readers(layer) {
            let value = |samples| Value::Gradient { layer, reader, samples };
            let part = self.take_whole(step, layer, reader, samples, value)?;
            match &mut sum {
                None => sum = Some(part),
                Some(sum) => {
                    let rows = Mat::new(&part, samples.count(), part.len() / samples.count());
                    self.device.add_scaled(1.0, rows, (sum, true))?;
                }
            }
        }
        Ok(sum)
    }

    /// A copy of some samples' rows.
    fn cut(&self, layer: usize, whole: &Tensor, samples: Samples, piece: Samples) -> Result<Tensor> {
        let each = whole.len() / samples.count();
        let mut part = self.boundary(layer, piece)?;
        let rows = Mat::new(whole, samples.count(), each).rows(piece.start - samples.start, piece.count());
        self.device.set_rows(Some(rows), MatMut::new(&mut part, piece.count(), each))?;
        Ok(part)
    }
}
