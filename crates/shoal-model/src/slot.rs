//! What a tensor is to its layer, and what follows from that whatever the model.

/// What a tensor is to its layer. A layer's tensors are looked up by slot, so that kernels need no names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    TokenEmbedding,
    /// From the pixels of a patch to its row.
    PatchWeight,
    PatchBias,
    /// The row that stands before the patches.
    ClassToken,
    PositionEmbedding,
    TokenTypeEmbedding,
    EmbeddingNormWeight,
    EmbeddingNormBias,
    AttentionNormWeight,
    AttentionNormBias,
    /// Queries, keys and values from one matrix.
    QkvWeight,
    QkvBias,
    QueryWeight,
    QueryBias,
    KeyWeight,
    KeyBias,
    ValueWeight,
    ValueBias,
    AttentionOutputWeight,
    AttentionOutputBias,
    MlpNormWeight,
    MlpNormBias,
    GateWeight,
    GateBias,
    UpWeight,
    UpBias,
    DownWeight,
    DownBias,
    /// The dense layer of a head that has one.
    TransformWeight,
    TransformBias,
    FinalNormWeight,
    FinalNormBias,
    OutputWeight,
    OutputBias,
    ConvolutionWeight,
    ConvolutionBias,
    BatchNormWeight,
    BatchNormBias,
    RunningMean,
    RunningVariance,
}

impl Slot {
    /// Whether the gradient is made of nothing but what a block's backward has at hand when it is over: that of what projects
    /// normed rows. It may then be made later.
    pub fn may_be_put_off(self) -> bool {
        matches!(
            self,
            Slot::QkvWeight
                | Slot::QkvBias
                | Slot::QueryWeight
                | Slot::QueryBias
                | Slot::KeyWeight
                | Slot::KeyBias
                | Slot::ValueWeight
                | Slot::ValueBias
                | Slot::GateWeight
                | Slot::GateBias
                | Slot::UpWeight
                | Slot::UpBias
        )
    }

    /// Norms compute in fp32, whatever the precision of their layer, and so are the biases that convolutions add.
    pub fn is_fp32(self) -> bool {
        matches!(
            self,
            Slot::EmbeddingNormWeight
                | Slot::EmbeddingNormBias
                | Slot::AttentionNormWeight
                | Slot::AttentionNormBias
                | Slot::MlpNormWeight
                | Slot::MlpNormBias
                | Slot::FinalNormWeight
                | Slot::FinalNormBias
                | Slot::BatchNormWeight
                | Slot::BatchNormBias
                | Slot::RunningMean
                | Slot::RunningVariance
                | Slot::ConvolutionBias
        )
    }

    /// A row a token or class: padded where products want aligned rows.
    pub fn is_output(self) -> bool {
        matches!(self, Slot::OutputWeight | Slot::OutputBias)
    }
}
